"""Dataset catalog: named, versioned sets of record files, and batches of them in one global order.

docs/guide/datasets.md describes the guarantees, the files and their states. Importing this package
imports no torch.
"""

from fireflyer.datasets.catalog import Catalog
from fireflyer.datasets.dataset import Dataset
from fireflyer.datasets.loader import DistributedLoader

__all__ = ["Catalog", "Dataset", "DistributedLoader"]
