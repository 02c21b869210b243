from fireflyer._native.fs3 import (
    client as client,
    io as io,
    replica as replica,
    store as store
)
