"""Workspaces: the folder that a task runs in, as it was when the task was submitted.

    manifest.py    definition of a workspace; checks of manifests from outside (pure)
    gitignore.py    names that .gitignore files leave out
    snapshot.py    a folder becomes a manifest
    stream.py      many blobs in one request body (pure)
    blob_store.py       blobs and manifests in the home
    fsync.py     durability across a power cut
    materialize.py     a manifest becomes a folder: a task's, or one that is pulled
    client.py    the client's side: ship, list, pull, prune
    routes.py      the server's side
    venvs.py       environments by lock file; venv_builder.py is the process that makes one
    tasks.py       the controller's checks of a new task, and preparation of an attempt

docs/operate/hai-workspace.md lists the guarantees.
"""
