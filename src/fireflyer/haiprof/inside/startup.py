"""Start of an interpreter after `haiprof enable`: its `.pth` file imports this module."""

import sys

from fireflyer.haiprof.inside.prepare import TorchWatch

sys.meta_path.insert(0, TorchWatch())
