"""Contracts about turns that are read to their end."""

from __future__ import annotations

import functools
import threading

from bench.contracts.adapter import LIMIT_S
from bench.contracts.scripted import ContractBroken
from bench.contracts.stage import (
    Stage,
    demand,
    demand_echo,
    demand_echoes,
    demand_no_error,
    demand_nothing,
    demand_tokens,
    prompt_of,
    read_out,
    take,
    together,
)
from bench.schemes.messages import TurnFailed


def whole_turn(stage: Stage) -> None:
    """A turn read to its end has exactly its tokens and its figures, and so has the next on the same decoder."""
    (decoder,) = stage.open_scripted(1)
    for number in range(2):
        turn = stage.start(prompt_of(number), 8)
        gen = decoder.wait_gen(number)
        demand(gen.prompt == prompt_of(number) and gen.max_new == 8, f"the decoder was asked for {gen}")
        ids = [7000 + 10 * number + position for position in range(3)]
        decoder.emit("REUSED 2")
        decoder.emit_tokens(*ids)
        decoder.emit_done(gen, 3, "stop", reused=2)
        demand_tokens(turn, ids, f"turn {number}")
        result = turn.result()
        figures = (result.generated, result.prompt_tokens, result.finish, result.reused)
        demand(figures == (3, 5, "stop", 2), f"turn {number} reports {result}")
    demand(len(decoder.commands()) == 2, f"the decoder was sent {decoder.commands()}")


def decoder_error(stage: Stage) -> None:
    """A decoder's ERR is told to the turn it belongs to, and to nobody else; the decoder serves on."""
    (decoder,) = stage.open_scripted(1)
    refused = stage.start(prompt_of(0), 8)
    decoder.wait_gen(0)
    queued = stage.start(prompt_of(1), 8)
    decoder.play_echo()
    decoder.emit("ERR prompt of 5 tokens is not to my taste")
    try:
        token = refused.next_token()
    except TurnFailed as error:
        demand("not to my taste" in str(error), f"the refused turn was told something else: {error}")
    else:
        raise ContractBroken(f"the refused turn was not told; it received {token}")
    demand_echo(queued, prompt_of(1), 8, "the turn behind the refused one")
    demand_no_error(queued, "the turn behind the refused one")


def delayed_done(stage: Stage) -> None:
    """A turn whose tokens have all come is not over before its DONE: nobody is told so, and the next GEN waits."""
    (decoder,) = stage.open_scripted(1)
    first = stage.start(prompt_of(0), 4)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1, 2, 3, 4)
    demand(take(first, 4) == [1, 2, 3, 4], "the first turn received other tokens")
    queued = stage.start(prompt_of(1), 12)
    demand(len(decoder.commands()) == 1, "a command was written while a DONE was due")
    decoder.play_echo()
    decoder.emit_done(gen, 4, "length")
    demand_tokens(first, [], "the first turn, after its last token,")
    demand_echo(queued, prompt_of(1), 12, "the queued turn")
    texts = [line.text.split(" ")[0] for line in decoder.log]
    demand(texts.index("DONE") < len(texts) - 1 - texts[::-1].index("GEN"), "the next GEN came before the DONE")


def slow_consumer(stage: Stage) -> None:
    """A consumer that does not read slows no other turn, and finds every token of its own when it reads on."""
    stage.open_scripted(2)
    slow = stage.start(prompt_of(0), 400)
    decoder = stage.wait_serving(prompt_of(0))
    stage.play_echo()
    ids = list(range(50000, 50400))
    decoder.emit_tokens(*ids)
    decoder.emit_done(decoder.wait_gen(0), 400, "length")
    demand(take(slow, 1) == ids[:1], "the slow consumer received another first token")
    for number in (1, 2, 3):
        demand_echo(stage.start(prompt_of(number), 20), prompt_of(number), 20, f"quick turn {number}")
    demand_tokens(slow, ids[1:], "the slow consumer")
    demand_echo(stage.start(prompt_of(4), 20), prompt_of(4), 20, "the turn after the slow one")


def independent_replicas(stage: Stage) -> None:
    """While one decoder says nothing in the middle of a turn, the other serves; then the silent turn goes on."""
    stage.open_scripted(2)
    stuck = stage.start(prompt_of(0), 6)
    decoder = stage.wait_serving(prompt_of(0))
    decoder.emit_tokens(61, 62)
    demand(take(stuck, 2) == [61, 62], "the turn received other tokens")
    stage.play_echo()
    for number in (1, 2, 3):
        demand_echo(stage.start(prompt_of(number), 9), prompt_of(number), 9, f"turn {number} on the other decoder")
    demand(len(decoder.gens()) == 1, "a turn was given to a decoder that owes a DONE")
    decoder.emit_tokens(63)
    decoder.emit_done(decoder.wait_gen(0), 3)
    demand_tokens(stuck, [63], "the turn that was stuck")


def eighty_turns(stage: Stage) -> None:
    """Four callers at once take twenty turns each over two decoders: each turn has its own tokens and nothing else."""
    stage.open_scripted(2)
    stage.play_echo()
    ready = threading.Barrier(4)

    def call(caller: int) -> None:
        ready.wait(LIMIT_S)
        for number in range(20):
            prompt = prompt_of(20 * caller + number, length=3 + number)
            demand_echo(stage.start(prompt, 5 + number), prompt, 5 + number, f"turn {number} of caller {caller}")

    together([functools.partial(call, caller) for caller in range(4)])


def cancel_while_queued(stage: Stage) -> None:
    """A turn cancelled while it waits writes and reads nothing: the running turn keeps its tokens and its DONE."""
    (decoder,) = stage.open_scripted(1)
    running = stage.start(prompt_of(0), 6)
    gen = decoder.wait_gen(0)
    decoder.emit_tokens(1, 2)
    demand(take(running, 2) == [1, 2], "the running turn received other tokens")
    cancelled, behind = stage.start(prompt_of(1), 12), stage.start(prompt_of(2), 12)
    cancelled.cancel()
    decoder.emit_tokens(3)
    demand(take(running, 1) == [3], "the running turn received another token after the cancellation")
    demand(len(decoder.commands()) == 1, f"a queued turn wrote to the decoder: {decoder.commands()}")
    decoder.play_echo()
    decoder.emit_done(gen, 3)
    demand_tokens(running, [], "the running turn, after its last token,")
    demand_no_error(running, "the running turn")
    demand_echo(behind, prompt_of(2), 12, "the turn behind the cancelled one")
    demand_nothing(cancelled, "the cancelled turn")
    demand(len(decoder.commands()) == 2, f"the cancelled turn wrote to the decoder: {decoder.commands()}")


def nonfinite_forgets(stage: Stage) -> None:
    """A decoder that reports nonfinite has lost its cache: what the router believed of it attracts no more turns.

    One decoder comes to hold four blocks of a prompt, the other its first block. The long holder is preferred, until
    it reports nonfinite; then the short one is.
    """
    stage.open_scripted(2)
    conversation = prompt_of(0, length=257)
    block, longer, longest = conversation[:65], [*conversation, 11, 12], [*conversation, 11, 12, 13, 14]
    first = stage.start(conversation, 4)
    long_holder = stage.wait_serving(conversation)
    second = stage.start(block, 4)
    short_holder = stage.wait_serving(block)
    demand(short_holder is not long_holder, "two turns were given to one decoder while the other was idle")
    for holder, turn in ((short_holder, second), (long_holder, first)):
        holder.emit_tokens(21)
        holder.emit_done(holder.wait_gen(0), 1)
        demand_tokens(turn, [21], "a turn that fills a cache")
    third = stage.start(longer, 4)
    demand(stage.wait_serving(longer) is long_holder, "the turn went to the decoder that holds less of its prompt")
    stage.play_echo()
    long_holder.emit_tokens(31)
    long_holder.emit_done(long_holder.wait_gen(1), 1, "nonfinite", reused=257)
    demand(take(third, 1) == [31], "the turn received another token")
    read_out(third)
    fourth = stage.start(longest, 4)
    demand(stage.wait_serving(longest) is short_holder, "the router still believes in a cache that was dropped")
    demand_echo(fourth, longest, 4, "the turn after the nonfinite one")


def real_pipes(stage: Stage) -> None:
    """Over a decoder process and its OS pipes: queued turns of several lengths, each with its own tokens."""
    stage.open_processes(1)
    sizes = (3, 40, 700, 1)
    asked = [(prompt_of(number, size), size + 2) for number, size in enumerate(sizes)]
    demand_echoes([(stage.start(prompt, max_new), prompt, max_new) for prompt, max_new in asked])
    last = stage.start(prompt_of(9), 6)
    demand_echo(last, prompt_of(9), 6, "the last turn")
    result = last.result()
    demand(
        (result.generated, result.prompt_tokens, result.finish) == (6, 5, "length"), f"the last turn reports {result}"
    )
