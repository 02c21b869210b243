"""3FS-KV: a key-value store and an LLM page cache on shared storage (docs/guide/kv.md).

from fireflyer import kv

with kv.open("fs3:///db", write=True) as store:
    store.put(b"key", b"value")
pages = kv.cache("fs3:///pages", capacity=1 << 40)
"""

from fireflyer.kv.batch import WriteBatch
from fireflyer.kv.opening import cache, open  # the public names are `kv.cache` and `kv.open`
from fireflyer.kv.reading import Change, Snapshot
from fireflyer.kv.store import ReadOnlyStore, Store

__all__ = ["Change", "ReadOnlyStore", "Snapshot", "Store", "WriteBatch", "cache", "open"]
