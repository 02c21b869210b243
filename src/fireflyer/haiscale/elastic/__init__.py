"""Training that goes on without lost ranks and takes in newcomers."""
