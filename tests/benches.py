"""A bench for tests of the experiments."""

from typing import Any

from fakes import FakeModel

from bench import Bench

SIMULATED = {"model": "simulated", "delay-ms": "1", "jitter-ms": "0"}


class FastBench(Bench):
    """Real servers with a simulated model, and a bare model of bytes in this process."""

    def __init__(self, relay: Any = None) -> None:
        super().__init__(SIMULATED, quiet=True)
        self._relay = relay

    async def server(self, *flags: str) -> str:
        url = await super().server(*flags)
        return await self._relay.before(url) if self._relay else url

    async def with_model(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(FakeModel(context=4096), *args, **kwargs)


def cells(finding: Any, *columns: str) -> list[tuple[str, ...]]:
    """The rows of a finding, reduced to some columns."""
    return [tuple(row[finding.header.index(column)] for column in columns) for row in finding.rows]


def milliseconds(cell: str) -> float:
    """The number of a cell that is in milliseconds."""
    assert cell.endswith(" ms")
    return float(cell.removesuffix(" ms"))
