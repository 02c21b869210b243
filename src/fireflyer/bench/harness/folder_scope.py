"""Services of a benchmark in a folder that exists only while they run."""

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self


class FolderScope(ABC):
    """Context manager of services: makes their folder anew, starts them, and closes them at the end.

    Attributes:
        folder: folder of the services; `close` removes it.
        inner: folder to make: `folder` itself or a folder below it.
    """

    folder: Path
    inner: Path

    @abstractmethod
    def start(self) -> None:
        """Starts the services. At this time the folder contains at most the empty inner folder."""

    @abstractmethod
    def close(self) -> None:
        """Ends the services, also after a failed start, and removes the folder."""

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.inner.mkdir(parents=True)
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
