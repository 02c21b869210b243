"""Page cache of an LLM engine: fixed keys, pages of up to 1 GiB, bounded in bytes.

See docs/guide/data/kv-cache.md.
"""
