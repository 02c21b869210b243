"""Workspaces: a copy of the user's folder at the submission of a task, in which the task runs.

    manifest.py      definition of a workspace; checks of untrusted manifests (pure)
    gitignore.py     names that .gitignore files leave out
    snapshot.py      a folder becomes a manifest
    stream.py        format of a request body with many blobs (pure)
    blob_store.py    blobs and manifests in the home
    fsync.py         durability across a power cut
    materialize.py   a manifest becomes a folder: of a task, or of a user who pulls a workspace
    containment.py   checks that a task's files are in its workspace
    client.py        client: ship, list, pull, prune; its routes are in `server/routes/workspaces.py`
    venvs.py         environments by lock file; venv_builder.py is the program that creates one
    tasks.py         the controller's checks of a new task, and preparation of an attempt

docs/operate/hai-workspace.md lists the guarantees.
"""
