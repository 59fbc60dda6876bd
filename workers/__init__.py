"""Owning decoders: the worker process on one end, and on the other the pool that the server holds.

worker process   process.py (the loop), decoder.py (the child), turns.py, stderr.py
in the server    pool.py, waiting.py (queue), router.py, prefix.py, replica.py, supervisor.py, watchdog.py, turn.py
Nothing here knows HTTP.
"""
