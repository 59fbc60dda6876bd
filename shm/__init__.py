"""What the server and one worker share: a sealed memfd with a board, request slots and a token ring, and its doorbells.

Imports nothing of ours. `layout` draws the segment; every other module is a view of one part of it.
"""
