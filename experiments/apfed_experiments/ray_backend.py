"""joblib's backend of a Ray cluster, which returns each result as soon as it is available.

Run by: the process of a study, with `--backend ray`. The backend that Ray itself brings
(`ray.util.joblib`) returns nothing before all runs are done, so a study would show no progress, and
it replaces a base class of joblib's for the whole process. This one submits each batch as a task
of Ray's. Ray repeats a task whose worker died; an error that a task raises is raised to the study,
as with every backend.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from joblib.parallel import ParallelBackendBase
from ray.exceptions import RayTaskError

__all__ = ["RayBackend"]

_MAX_RETRIES = 3
"""Largest number of times that Ray repeats a task whose worker died."""


def _call_task(task: Callable[[], Any]) -> Any:
    """Return the result of a task: the function that Ray runs on a worker."""
    return task()


class RayBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib ships no annotations
    """joblib's backend over the Ray cluster that this process is connected to."""

    supports_retrieve_callback = True

    def __init__(self, **settings: Any) -> None:
        """Prepare the backend; `settings` are joblib's.

        Ray's tasks are awaited in threads of this process, which `configure` starts.
        """
        super().__init__(**settings)
        self._remote_task = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_call_task)
        self._waiters: ThreadPoolExecutor | None = None
        self._running_tasks: set[Any] = set()  # Ray's references to the tasks that are not done

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many tasks run at once: `n_jobs`, one for None, or one for each CPU of the
        cluster for a number below 1.
        """
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Start a thread of this process for each task that runs at once, and return their number.

        `n_jobs`: number of tasks at once, below 1 one for each CPU of the cluster. `parallel`: the
        `joblib.Parallel` object that uses this backend.
        """
        self.parallel = parallel
        jobs = self.effective_n_jobs(n_jobs)
        self._waiters = ThreadPoolExecutor(jobs, thread_name_prefix="ray task")
        return jobs

    def submit(
        self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None
    ) -> "Future[Any]":
        """Start the task `func`, and call `callback` with its future when it is done.

        `callback` runs in a thread of this process, where it starts further tasks; in a thread of
        Ray it would wait for itself.
        """
        assert self._waiters is not None, "configured before"
        future = self._waiters.submit(self._await_task, func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def _await_task(self, func: Callable[[], Any]) -> Any:
        """Run the task `func` on the cluster; return its result, or raise its error."""
        reference = self._remote_task.remote(func)
        self._running_tasks.add(reference)
        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        finally:
            self._running_tasks.discard(reference)

    def retrieve_result_callback(self, out: "Future[Any]") -> Any:
        """Return the result of a finished task, or raise its error; joblib calls this in its
        callback.
        """
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel all tasks, since the study ends by an error or an interrupt.

        `ensure_ready`: whether the backend will be used again.
        """
        if self._waiters is not None:
            self._waiters.shutdown(wait=False, cancel_futures=True)
        for reference in list(self._running_tasks):
            ray.cancel(reference, force=True)
        if ensure_ready:
            self.configure(self.parallel.n_jobs, self.parallel)

    def terminate(self) -> None:
        """Let the waiting threads end, after the last task."""
        if self._waiters is not None:
            self._waiters.shutdown(wait=False)
