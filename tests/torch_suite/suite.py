"""torch's tests as a class of cases over hfreduce, and one run of a case."""

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.torch_suite import gates
from tests.torch_suite.expected import EXPECTED_HANGS
from tests.torch_suite.ranks import DEADLINE_S, Outcome, Ranks, outcome_of, temporary_folder

BARRIER_S = 60.0

# Tests whose bodies build a model for gloo, MPI or NCCL by name, and none for any other backend.
BODY_TAKES_FOR = {
    "test_accumulate_gradients_no_sync": "gloo",
    "test_accumulate_gradients_no_sync_allreduce_hook": "gloo",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": "gloo",
    "test_accumulate_gradients_no_sync_grad_is_view": "gloo",
}


class Suite:
    """The tests of `_DistTestBase`, run in ranks forked from this process.

    Creating a suite imports torch's tests. They change torch's settings for the whole process, so the
    process should do nothing else with torch.

    Args:
        hosts: virtual hosts over which the ranks are spread.
    """

    def __init__(self, hosts: int = 1) -> None:
        self._hosts = hosts
        self._module = gates.load_tests()
        self._skip_codes = {
            skip.exit_code: skip.message for skip in self._module.TEST_SKIPS.values()
        }
        self._common = importlib.import_module("torch.testing._internal.common_distributed")
        self._case = _case_of(self._module)
        _be_patient(self._module)

    def names(self) -> list[str]:
        """Names of all tests, sorted."""
        return sorted(name for name in dir(self._case) if name.startswith("test"))

    def run(self, name: str) -> Outcome:
        """Run one test on all ranks.

        Returns:
            The outcome of the first rank that fails, else the one that all ranks have in common.
        """
        patience = self._common.TIMEOUT_OVERRIDE.get(name, DEADLINE_S)
        deadline_s = EXPECTED_HANGS.get(name, patience)
        method = getattr(self._case, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skipped", method.__unittest_skip_why__)
        with temporary_folder() as folder:
            ranks = Ranks(Path(folder))
            try:
                for rank in range(gates.WORLD_SIZE):
                    ranks.start(rank, self._body(name, rank, folder))
                outcomes = ranks.outcomes(deadline_s)
            finally:
                ranks.kill()
            return _joined(outcomes, ranks)

    def _body(self, name: str, rank: int, folder: str) -> Callable[[], Outcome]:
        def body() -> Outcome:
            from tests.torch_suite.cuda import map_to_cpu

            for part in ("barrier", "test_dir", "init_dir"):
                os.makedirs(os.path.join(folder, part), exist_ok=True)
            os.environ.update(
                TEMP_DIR=folder,
                INIT_METHOD=f"file://{folder}/init_dir/shared_init_file",
                TMPDIR=folder,
                RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                FIREFLYER_NODE=f"n{rank * self._hosts // gates.WORLD_SIZE}",
                FIREFLYER_KERNEL_LOG="off",
                PYTORCH_PRINT_REPRO_ON_FAILURE="0",
            )
            self._module.INIT_METHOD = os.environ["INIT_METHOD"]
            tempfile.tempdir = None
            map_to_cpu(gates.WORLD_SIZE)
            return outcome_of(
                lambda: self._case._run(rank, name, f"{folder}/store", None), self._skip_codes
            )

        return body


def _case_of(module: Any) -> Any:
    common_utils: Any = importlib.import_module("torch.testing._internal.common_utils")

    class OverHFReduce(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        """torch's case for one rank; processes are ours."""

        def run_test(self, test_name: str, parent_pipe: object) -> None:
            common_utils.set_rng_seed()
            module.BACKEND = BODY_TAKES_FOR.get(test_name, module.BACKEND)
            getattr(self, test_name)()

    return OverHFReduce


def _be_patient(module: Any) -> None:
    """Make torch's helpers fit for a busy machine."""
    sync = module.Barrier.sync
    rank_temp_file = module._rank_temp_file

    def patient_sync(wait_for: int | None = None, timeout: float = BARRIER_S) -> None:
        sync(wait_for, max(timeout, BARRIER_S))

    @contextmanager
    def kept_temp_file() -> Iterator[str]:
        """Let all ranks read the file before rank 0 removes it, which torch's own helper does not."""
        with rank_temp_file() as name:
            yield name
            module.dist.barrier()

    module.Barrier.sync = patient_sync
    module._rank_temp_file = kept_temp_file


def _joined(ended: list[tuple[int, Outcome]], ranks: Ranks) -> Outcome:
    for rank, outcome in ended:
        if outcome.kind == "failed":
            printed = ranks.output(rank).read_text(errors="replace")
            return Outcome("failed", f"rank {rank}:\n{printed}\n{outcome.text}")
    outcomes = {outcome for _, outcome in ended}
    if len(outcomes) > 1:
        return Outcome("failed", f"the ranks disagree: {ended}")
    return outcomes.pop()
