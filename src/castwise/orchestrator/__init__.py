"""The parent: processes, interleaved sessions, rounds, the stop rule."""
