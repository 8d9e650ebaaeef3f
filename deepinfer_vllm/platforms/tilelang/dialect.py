"""The words of a tile body that differ between an NPU and a CPU.

| word | AscendC | C |
|---|---|---|
| `kernel` | a block is a cube core with two vector cores | a block is an iteration |
| `on_vector`, `on_cube`, `accumulator` | UB, L1, L0C | the stack |
| `region`, `each` | SIMT threads of a vector core | loops |
| `matmul` | the cube unit | loops |
| `share` | each vector core takes or gives half of the rows | all of them |
| `held` | bfloat16 | its bits: TileLang's C has no bfloat16 |

One word more is not shared: TileLang's automatic scheduling and synchronisation exist for the NPU alone.
"""

import contextlib
import functools
from typing import Any

C, ASCEND = "c", "ascend"
THREADS = 128
"""Of a SIMT region."""


class Dialect:
    """TileLang's language for one target. Methods are called while a kernel is traced."""

    def __init__(self, target: str) -> None:
        self.target = target
        if target == ASCEND:
            import tilelang.ascend.language as language
        else:
            import tilelang.language as language
        self.T: Any = language
        self.vectors = 2 if target == ASCEND else 1
        """Vector cores that share a tile: `share` leaves each 1 / `vectors` of its rows."""
        self._product, self._weighted, self._row_max, self._row_sum = _macros(language)

    def kernel(self, blocks: Any) -> Any:
        """The grid."""
        return self.T.Kernel(blocks) if self.target == ASCEND else self.T.Kernel(blocks, threads=1)

    def on_vector(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer that vector code reads and writes."""
        return (self.T.alloc_shared if self.target == ASCEND else self.T.alloc_local)(shape, dtype)

    def on_cube(self, shape: tuple[int, int], dtype: str) -> Any:
        """An operand of `matmul`."""
        return (self.T.alloc_l1 if self.target == ASCEND else self.T.alloc_local)(shape, dtype)

    def accumulator(self, shape: tuple[int, int]) -> Any:
        """A result of `matmul`, float32."""
        return (self.T.alloc_l0c if self.target == ASCEND else self.T.alloc_local)(shape, "float32")

    def region(self) -> Any:
        """A block of vector code, in which alone `each` may stand."""
        return self.T.SimtVF(threads=THREADS) if self.target == ASCEND else contextlib.nullcontext()

    def each(self, *extents: int) -> Any:
        """Iterations in any order."""
        return (self.T.Parallel if self.target == ASCEND else self.T.grid)(*extents)

    def share(self, source: Any, destination: Any) -> Any:
        """Copy between a tile [R, ...] and a vector core's part of it [R / vectors, ...], either way."""
        return self.T.dual_copy(source, destination) if self.target == ASCEND else self.T.copy(source, destination)

    def held(self, dtype: str) -> str:
        """The type of a buffer of `dtype`."""
        return "uint16" if self.target == C and dtype == "bfloat16" else dtype

    def widened(self, value: Any) -> Any:
        """float32 of an element of a `held` buffer."""
        if self.target == C and value.dtype == "uint16":
            return self.T.reinterpret(self.T.cast(value, "uint32") << 16, "float32")
        return self.T.cast(value, "float32")

    def narrowed(self, value: Any, held: str) -> Any:
        """The finite float32 `value`, rounded to nearest even, as an element of a buffer of type `held`."""
        if self.target == C and held == "uint16":
            bits = self.T.reinterpret(value, "uint32")
            return self.T.cast((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, "uint16")
        return self.T.cast(value, held)

    def matmul(self, a: Any, b: Any, out: Any, clear: Any) -> Any:
        """out [R, N] = a [R, K] times b [N, K] transposed, added to what is there unless `clear`."""
        if self.target == ASCEND:
            return self.T.gemm(a, b, out, transpose_B=True, clear_accum=clear)
        return self._product(self, a, b, out, clear)

    def left(self, shape: tuple[int, int], dtype: str) -> Any:
        """Where the cube unit takes the weights of `weighted_rows` from."""
        return (self.T.alloc_l0a if self.target == ASCEND else self.T.alloc_local)(shape, dtype)

    def right(self, shape: tuple[int, int], dtype: str) -> Any:
        """Where it takes their rows from."""
        return (self.T.alloc_l0b if self.target == ASCEND else self.T.alloc_local)(shape, dtype)

    def weighted_rows(self, weights: Any, rows: Any, first: Any, left: Any, right: Any, out: Any) -> Any:
        """out [R, W] = weights [R, N] times channels first .. first + W of rows [N, D], through `left` and `right`."""
        return self._weighted(self, weights, rows, first, left, right, out)

    def row_max(self, source: Any, out: Any) -> Any:
        """out [R] of source [R, N], inside a `region`."""
        return self.T.reduce_max(source, out, dim=1) if self.target == ASCEND else self._row_max(source, out)

    def row_sum(self, source: Any, out: Any) -> Any:
        """out [R] of source [R, N], inside a `region`."""
        return self.T.reduce_sum(source, out, dim=1) if self.target == ASCEND else self._row_sum(source, out)


def _macros(T: Any) -> tuple[Any, Any, Any, Any]:
    """Words that are more than one of TileLang's; loops for what an NPU has units for."""

    @T.macro
    def product(d, a, b, out, clear):  # noqa: ANN001, ANN202
        if clear:
            for i, j in T.grid(out.shape[0], out.shape[1]):
                out[i, j] = 0.0
        for i, j, k in T.grid(out.shape[0], out.shape[1], a.shape[1]):
            out[i, j] += d.widened(a[i, k]) * d.widened(b[j, k])

    @T.macro
    def weighted(d, weights, rows, first, left, right, out):  # noqa: ANN001, ANN202
        T.copy(weights, left)
        T.copy(rows[0 : right.shape[0], first : first + right.shape[1]], right)
        if d.target == ASCEND:
            T.gemm(left, right, out, clear_accum=True)
        else:
            for i, j in T.grid(out.shape[0], out.shape[1]):
                out[i, j] = 0.0
            for i, j, k in T.grid(out.shape[0], out.shape[1], left.shape[1]):
                out[i, j] += d.widened(left[i, k]) * d.widened(right[k, j])

    @T.macro
    def row_max(source, out):  # noqa: ANN001, ANN202
        for i in T.serial(source.shape[0]):
            out[i] = source[i, 0]
            for j in T.serial(source.shape[1] - 1):
                out[i] = T.max(out[i], source[i, j + 1])

    @T.macro
    def row_sum(source, out):  # noqa: ANN001, ANN202
        for i in T.serial(source.shape[0]):
            out[i] = 0.0
            for j in T.serial(source.shape[1]):
                out[i] += source[i, j]

    return product, weighted, row_max, row_sum


@functools.cache
def dialect(target: str) -> Dialect:
    """Of "c" or "ascend". Raises ModuleNotFoundError where TileLang is not installed."""
    return Dialect(target)
