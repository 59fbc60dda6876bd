"""A pool in a process of its own, to be killed or stopped: `python -m tests.workers.server_process SETTINGS STREAMS`.

Prints one line of JSON when its streams have their first tokens (or at once when STREAMS is 0), and another one when all of
them have ended: how many were exact, and the pool's counters.
"""

import asyncio
import json
import sys
from dataclasses import asdict

import msgspec

from tests.fakes.echo import echo_prompt, expected
from tests.workers.running import request, tokens, until
from workers.pool import Pool
from workers.settings import PoolSettings
from workers.turn import Turn


async def serve(settings: PoolSettings, streams: int) -> None:
    pool = Pool(settings)
    await pool.start()
    turns: list[Turn] = []
    if streams:
        await until(lambda: all(replica.is_serving for replica in pool.replicas), what="serving")
        turns = [pool.submit(request(echo_prompt(marker), 400)) for marker in range(streams)]
        for turn in turns:
            await tokens(turn, 1)
    say(workers=[replica.incarnation.pid for replica in pool.replicas if replica.incarnation is not None])
    for turn in turns:
        await turn.wait_ended()
    exact = sum(list(turn.ids) == expected(turn.request.prompt, turn.request.max_new) for turn in turns)
    say(exact=exact, counters=asdict(pool.snapshot().counters))
    await asyncio.Event().wait()


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=PoolSettings), int(sys.argv[2])))
