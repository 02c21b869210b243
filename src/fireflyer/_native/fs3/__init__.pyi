from fireflyer._native.fs3 import replica as replica, store as store
