"""The real server under random SIGKILLs and SIGSTOPs of its workers and decoders, with every token checked.

    python -m bench.chaos --kills 200 --streams 32 [--json] [--seed N] [--quick]

    clients (streams.py) ---HTTP---> server ---> 3 workers ---> 3 decoders
         |  every token compared          \\        \\              \\
         v                                  +--- killer.py: SIGKILL or SIGSTOP, at random moments under load
    comparison.py: lost, duplicated, foreign

Twice: on the scripted decoder, whose every token is known beforehand (scripted.py), and on the tiny model with the real
decoder, whose undisturbed answers are recorded first (recorded.py). Afterwards the server must be clean (traces.py): nothing
runs or waits, every slot is free, no descriptor, process or zombie is left over, and a fresh request succeeds.
"""
