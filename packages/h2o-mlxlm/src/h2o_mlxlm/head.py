"""The cache of one head alone, for layers whose heads hold different numbers of rows."""

from dataclasses import replace

import mlx.core as mx

from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.slots import evicted


class HeadCache(H2OKVCache):
    """One head of one sequence, whose budget its layer may change between two calls."""

    @property
    def held(self) -> int:
        """Rows once the last call has ended."""
        return self._counts[0].kept

    @property
    def kind(self) -> tuple[int, int, mx.Dtype, mx.Dtype]:
        """Widths and dtypes of its keys and values."""
        keys, values, _ = self._live()
        return keys.kind[1], values.kind[1], keys.kind[2], values.kind[2]

    def loses_several(self, n_tokens: int) -> bool:
        """Say whether more than one row would go at the end of a call of so many tokens."""
        waits = self._counts[0].holding and n_tokens > 1
        return not waits and self.held + n_tokens > self.config.budget + 1

    def make_room(self, n_tokens: int) -> None:
        """Let nothing go at the end of the next call, of so many tokens."""
        self._end_call()
        self.config = replace(self.config, budget=self.held + n_tokens)

    def cut(self, budget: int) -> None:
        """Keep the best ``budget`` rows, and no more from now on."""
        self._end_call()
        self.config = replace(self.config, budget=budget)
        self._slots = evicted(self.config, self.backend, self._live())
        self._count((self._counts[0]._replace(kept=budget),))
