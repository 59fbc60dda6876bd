"""Ways to share decoders between threads, kept to measure against: what ringfence replaces, and the known repairs.

Each is small and written as somebody would have written it: a reader thread with a queue per decoder, a lock per
replica, and the iterator of one turn handed to the caller. They differ only in what happens when a turn lets go of
its replica.

    original     the child iterator is forwarded with a plain `for`; the lock is released without closing it
    close-only   the child is closed, which reads up to its DONE, before the lock is released; statistics stay shared
    A            closed, and the statistics copied for the caller, before the lock is released B            one turn
    object owns the lock, the iterator and the result C, threads   one thread per decoder alone reads and writes the
    pipe; a bounded channel per request (only timed, in transport)
"""
