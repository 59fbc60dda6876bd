"""The native decoder: its line protocol (Python), what it can be asked for, and the decoder on llama.cpp (C++)."""
