"""Contracts about a turn's figures: they are the caller's own, however late it looks at them."""

from __future__ import annotations

from bench.contracts.stage import Stage, demand, demand_echo, demand_stop, demand_tokens, prompt_of, take


def figures_after_hand_over(stage: Stage) -> None:
    """Execution yields right after the hand-over: a queued turn runs to its end before the first caller looks."""
    (decoder,) = stage.open_scripted(1)
    first = stage.start(prompt_of(0, length=9), 3)
    gen = decoder.wait_gen(0)
    queued = stage.start(prompt_of(1, length=4), 12)
    decoder.play_echo()
    decoder.emit_tokens(1, 2, 3)
    decoder.emit_done(gen, 3, "stop", reused=6)
    demand_tokens(first, [1, 2, 3], "the first turn")
    demand_echo(queued, prompt_of(1, length=4), 12, "the queued turn")
    result = first.result()
    figures = (result.generated, result.prompt_tokens, result.finish, result.reused)
    demand(figures == (3, 9, "stop", 6), f"the first caller was given the figures of another turn: {result}")
    second = queued.result()
    demand((second.generated, second.prompt_tokens) == (12, 4), f"the second caller was given {second}")


def figures_of_closed_turn(stage: Stage) -> None:
    """A caller that left its turn early is billed for what that turn generated, whatever ran since."""
    (decoder,) = stage.open_scripted(1)
    left = stage.start(prompt_of(0, length=9), 50)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1, 2)
    demand(take(left, 2) == [1, 2], "the first turn received other tokens")
    left.close()
    following = stage.start(prompt_of(1, length=4), 12)
    demand_stop(decoder)
    decoder.play_echo()
    decoder.emit_tokens(3)
    decoder.emit_done(gen, 3, "cancel", reused=8)
    demand_echo(following, prompt_of(1, length=4), 12, "the next turn")
    result = left.result()
    figures = (result.generated, result.prompt_tokens, result.finish, result.reused)
    demand(figures == (3, 9, "cancel", 8), f"the first caller was given the figures of another turn: {result}")
