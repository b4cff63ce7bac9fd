"""`--ray`: the same workers as tasks of Ray, one per device anywhere in a cluster, on a disk that all nodes share."""

from __future__ import annotations

from typing import Any

from mmspec.app.caption.model import FatalError
from mmspec.app.caption.options import AUTO
from mmspec.app.caption.workers import serve
from mmspec.app.extras import installing


class OnRay:
    """Starts workers on the Ray that runs here or at RAY_ADDRESS; starts one where there is none."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise FatalError(f"--ray needs Ray; {installing('ray')}") from error
        self.ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")  # type: ignore[arg-type]
        self.nodes = max(1, len([node for node in ray.nodes() if node["Alive"]]))

    def start(self, job: Any, place: str, *rest: Any) -> Any:
        task = self.ray.remote(num_cpus=1, num_gpus=int(place.startswith("cuda")), max_retries=0)(serve)
        return task.remote(job, place, *rest)

    def ended(self, call: Any) -> str:
        done, _ = self.ray.wait([call], timeout=0)
        if not done:
            return ""
        try:
            self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return "it returned"

    def kill(self, call: Any) -> None:
        self.ray.cancel(call, force=True)

    def close(self) -> None:
        if self._ours:
            self.ray.shutdown()

    def places(self, devices: str) -> list[str]:
        """One name per worker: `auto` is a GPU each of the whole cluster, or one on the CPU.

        FatalError if the cluster has fewer GPUs, or cores, than are named: Ray would wait for more without a word.
        """
        there = self.ray.cluster_resources()
        gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
        names = [name.strip() for name in devices.split(",") if name.strip()]
        named = ["cuda" if name.isdecimal() or name.startswith("cuda") else name for name in names]
        found = (["cuda"] * gpus or ["cpu"]) if devices == AUTO else named
        if found.count("cuda") > gpus or len(found) > cpus:
            raise FatalError(
                f"--devices {devices} asks for {found.count('cuda')} GPUs and {len(found)} cores; the Ray cluster has "
                f"{gpus} and {cpus}. Name fewer, or start more nodes"
            )
        return found
