"""Contracts about turns whose consumer leaves before their DONE is read. What is left of them is nobody else's."""

from __future__ import annotations

from bench.contracts.stage import (
    Stage,
    demand,
    demand_echo,
    demand_echoes,
    demand_no_error,
    demand_stop,
    demand_tokens,
    prompt_of,
    take,
)

END_OF_TURN = 151645


def end_of_turn(stage: Stage) -> None:
    """The end-of-turn token ends the answer; the DONE behind it stays this turn's, and the next gets its 12 tokens."""
    (decoder,) = stage.open_scripted(1)
    first = stage.start(prompt_of(0), 50, stop_ids=frozenset({END_OF_TURN}))
    gen = decoder.wait_gen(0)
    decoder.play_echo()
    decoder.emit_tokens(1, 2, 3, END_OF_TURN)
    decoder.emit_done(gen, 4)
    demand_tokens(first, [1, 2, 3], "the first turn")
    demand_echo(stage.start(prompt_of(1), 12), prompt_of(1), 12, "the next turn")


def early_close(stage: Stage) -> None:
    """A consumer that leaves has the generation stopped, and the next GEN waits for its DONE."""
    (decoder,) = stage.open_scripted(1)
    left = stage.start(prompt_of(0), 50)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1, 2, 3)
    demand(take(left, 2) == [1, 2], "the first turn received other tokens")
    left.close()
    following = stage.start(prompt_of(1), 12)
    demand_stop(decoder)
    decoder.play_echo()
    decoder.emit_tokens(4)
    decoder.emit_done(gen, 4, "cancel")
    demand_echo(following, prompt_of(1), 12, "the next turn")
    demand_no_error(left, "the consumer that left")


def stop_string(stage: Stage) -> None:
    """A consumer leaves at its stop string when all is generated: the tokens behind it and the DONE stay its own."""
    (decoder,) = stage.open_scripted(1)
    stopped = stage.start(prompt_of(0), 6)
    gen = decoder.wait_gen(0)
    decoder.play_echo()
    decoder.emit_tokens(1, 2, 3, 4, 5, 6)
    decoder.emit_done(gen, 6, "length")
    demand(take(stopped, 3) == [1, 2, 3], "the first turn received other tokens")
    stopped.close()
    demand_echo(stage.start(prompt_of(1), 12), prompt_of(1), 12, "the next turn")
    demand_no_error(stopped, "the consumer that stopped")


def consumer_exception(stage: Stage) -> None:
    """An exception in a consumer is its own caller's; its turn is stopped and drained like any that is left."""
    (decoder,) = stage.open_scripted(1)
    failing = stage.start(prompt_of(0), 50)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1, 2)
    demand(take(failing, 1) == [1], "the first turn received another token")
    queued = stage.start(prompt_of(1), 12)
    boom = RuntimeError("the client's socket is gone")
    failing.throw(boom)
    demand_stop(decoder)
    decoder.play_echo()
    decoder.emit_done(gen, 2, "cancel")
    demand(failing.error() is boom, "the caller was not told of its consumer's exception")
    demand_echo(queued, prompt_of(1), 12, "the queued turn")
    demand_no_error(queued, "the queued turn")


def failed_drain(stage: Stage) -> None:
    """If the engine breaks while a turn is drained, that turn's owner is told, and the decoder is not used again."""
    stage.open_scripted(2)
    left = stage.start(prompt_of(0), 50)
    broken = stage.wait_serving(prompt_of(0))
    broken.emit_tokens(1, 2)
    demand(take(left, 2) == [1, 2], "the first turn received other tokens")
    stage.play_echo()
    left.close()
    broken.emit("ERR verify: timed out at layer 7", "DONE 2 5 1.0 1.0 cancel")
    error = left.error()
    demand(
        error is not None and "timed out at layer" in str(error), f"the owner was told {error!r} of the failed drain"
    )
    for number in range(1, 5):
        demand_echo(stage.start(prompt_of(number), 12), prompt_of(number), 12, f"turn {number} after the failure")
    uses = [gen.incarnation for gen in broken.gens()].count(1)
    demand(uses == 1, "a turn was given to the decoder that had failed")


def late_done(stage: Stage) -> None:
    """A stopped decoder may go on for a while: late tokens and a late DONE reach none of the turns that wait behind."""
    (decoder,) = stage.open_scripted(1)
    left = stage.start(prompt_of(0), 50)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1)
    demand(take(left, 1) == [1], "the first turn received another token")
    waiting = [(stage.start(prompt_of(number), 12), prompt_of(number), 12) for number in (1, 2, 3)]
    left.cancel()
    demand_stop(decoder)
    decoder.emit_tokens(*range(2, 40))
    demand(len(decoder.gens()) == 1, "a GEN was written before the late DONE")
    decoder.play_echo()
    decoder.emit_done(gen, 39, "cancel")
    demand_echoes(waiting)
    demand(len(decoder.gens()) == 4, f"the decoder was sent {decoder.commands()}")


def real_pipes_left(stage: Stage) -> None:
    """Over a decoder process and its OS pipes: a turn left in full flow leaves no token to the next."""
    stage.open_processes(1)
    for round_number in range(3):
        prompt, following = prompt_of(2 * round_number), prompt_of(2 * round_number + 1, length=30)
        left = stage.start(prompt, 20000)
        demand(take(left, 3) == prompt[:3], "the first turn received other tokens")
        left.close()
        demand_echo(stage.start(following, 12), following, 12, "the turn after the one that was left")
        demand_no_error(left, "the consumer that left")
