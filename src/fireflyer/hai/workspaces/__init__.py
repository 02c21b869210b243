"""Workspaces: the folder that a task runs in, as it was when the task was handed in.

    manifest.py    what a workspace is; what of one from outside is refused (pure)
    ignoring.py    which names .gitignore files leave out
    snapshot.py    a folder becomes a manifest
    stream.py      many blobs in one request body (pure)
    depot.py       blobs and manifests in the home
    syncing.py    what was written survives a power cut
    placing.py     a manifest becomes a folder: a task's, or one that is pulled
    shipping.py    the client's side: ship, list, pull, prune
    routes.py      the server's side
    venvs.py       environments by lock file; making.py is the process that makes one
    tasks.py       what the controller asks before a task is taken in, and before an attempt starts

docs/hai-workspace.md has the promises.
"""
