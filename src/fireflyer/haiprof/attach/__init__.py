"""The profiler's side: checks, sessions and profiles on disk."""
