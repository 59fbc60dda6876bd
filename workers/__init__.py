"""Owning decoders: the worker process on one end, and on the other the pool that the server holds.

worker process   process.py joins loop.py, keeper.py (the decoder's life; decoder.py, stderr.py) and conversation.py
                 (what is said with it; running.py)
in the server    pool.py: waiting.py (the queue), roster.py (all workers), router.py and prefix.py (who takes a turn),
                 settlement.py (how turns end; blame.py), ledger.py (counts), operations.py, incidents.py
                 replica.py: one worker through its incarnations (incarnation.py); supervisor.py and watchdog.py decide,
                 session.py finds what a dead one left
for both         request.py, turn.py, job.py, errors.py, settings.py, snapshot.py, backoff.py, exits.py, devices.py

Nothing here knows HTTP.
"""
