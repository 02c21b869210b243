"""Fireflyer: train deep-learning models on ordinary machines as if they were a supercomputer.

It implements the software of the Fire-Flyer AI-HPC paper (arXiv 2408.14158). Importing this package
only defines names.
"""

__version__ = "0.1.0"
