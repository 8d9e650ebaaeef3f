"""Matrices in the published quantised formats, and their values, which bf16 and anything wider hold exactly.

Codes are e4m3 [N, K], or e2m1 two a byte [N, K / 2] with the low nibble first. Each row has a ue8m0 scale, a power of
two, for every 32 columns. A checkpoint may hold one for [32, 32] instead; it is repeated by row as it is read, so that
rows and whole blocks of columns can be taken apart.
"""

from dataclasses import dataclass

import torch

BLOCK = 32
E4M3, E2M1 = torch.float8_e4m3fn, torch.uint8
"""The dtypes that codes are held in."""

LARGEST_SCALE_BYTE = 246
"""2 ** 119: with more, the largest e4m3 value is beyond float32. 255 is NaN."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E4M3_AS_HALF = -0x4080  # bits 15 and 13..7
_HALF_TO_E4M3_EXPONENT = 8


@dataclass(frozen=True)
class QuantisedMatrix:
    """N rows of K values."""

    codes: torch.Tensor
    """[N, K] e4m3 or [N, K / 2] uint8, two e2m1 each."""
    scale: torch.Tensor
    """[N, ceil(K / 32)] uint8: ue8m0, by row."""

    @classmethod
    def published(cls, weight: torch.Tensor, scale: torch.Tensor) -> "QuantisedMatrix":
        """From a checkpoint's `X.weight` (e4m3, or int8 or uint8 holding e2m1) and `X.scale` (by row or by [32, 32]).

        Raises ValueError for a scale of another type or shape, and for NaN or a scale of 2 ** 120 or more.
        """
        if scale.dtype.itemsize != 1 or weight.dim() != 2:
            raise ValueError(f"weight {list(weight.shape)} with a scale of {scale.dtype}: must be a matrix and ue8m0")
        codes = weight if weight.dtype == E4M3 else weight.view(torch.uint8)
        scale = scale.view(torch.uint8)
        rows, columns = weight.shape[0], weight.shape[1] * (1 if weight.dtype == E4M3 else 2)
        blocks = -(-columns // BLOCK)
        if tuple(scale.shape) == (-(-rows // BLOCK), blocks):
            scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
        if tuple(scale.shape) != (rows, blocks):
            raise ValueError(f"scale {list(scale.shape)} does not cover weight {[rows, columns]} in blocks of {BLOCK}")
        if scale.numel() and (largest := int(scale.max())) > LARGEST_SCALE_BYTE:
            what = "NaN" if largest == 255 else f"2 ** {largest - 127} is too large"
            raise ValueError(f"scale byte {largest}: {what}")
        if codes.dtype == E4M3 and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise ValueError("weight holds e4m3 NaN")
        return cls(codes, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.codes.dtype == E4M3 else 2)

    def rows(self, part: slice) -> "QuantisedMatrix":
        """Some of the rows; nothing is copied."""
        return QuantisedMatrix(self.codes[part], self.scale[part])

    def columns(self, part: slice) -> "QuantisedMatrix":
        """Columns part.start to part.stop; nothing is copied. Raises ValueError where that cuts a block of 32."""
        start, stop = part.start, part.stop
        if start % BLOCK or (stop % BLOCK and stop != self.shape[1]):
            raise ValueError(f"columns {start} to {stop} cut a block of {BLOCK} that has one scale")
        a_byte = 1 if self.codes.dtype == E4M3 else 2
        return QuantisedMatrix(
            self.codes[:, start // a_byte : stop // a_byte], self.scale[:, start // BLOCK : -(-stop // BLOCK)]
        )

    def widen(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All values, [N, K]."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        widener = Widener(min(WORKSPACE_VALUES, out.numel()))
        for part in widener.parts(self):
            out[part] = widener(self.rows(part))
        return out


WORKSPACE_VALUES = 1 << 20
"""Values widened at once: 6 MiB of buffers, about what stays in a core's caches."""


class Widener:
    """Widens a bounded number of rows at a time, into the same buffers every time. Not thread-safe."""

    def __init__(self, values: int = WORKSPACE_VALUES) -> None:
        self._size = values
        self._values, self._bits = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.int32)

    def parts(self, matrix: "QuantisedMatrix | torch.Tensor") -> list[slice]:
        """The rows of a matrix, as many at a time as fit; at least one."""
        rows, columns = matrix.shape
        at_once = max(1, self._size // max(1, columns))
        return [slice(low, min(low + at_once, rows)) for low in range(0, rows, at_once)]

    def __call__(self, matrix: "QuantisedMatrix | torch.Tensor") -> torch.Tensor:
        """The values of these rows, [n, K] float32, good until the next call."""
        rows, columns = matrix.shape
        self._make_room(rows * columns, matrix.codes.device if isinstance(matrix, QuantisedMatrix) else matrix.device)
        values = self._values[: rows * columns].view(rows, columns)
        if isinstance(matrix, torch.Tensor):
            return values.copy_(matrix)
        if matrix.codes.dtype == E4M3:
            self._unpack_e4m3(matrix.codes, values)
        else:
            self._unpack_e2m1(matrix.codes, values)
        factors = _power_of_two(matrix.scale, _HALF_TO_E4M3_EXPONENT)
        whole = columns // BLOCK
        values[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).mul_(factors[:, :whole].unsqueeze(-1))
        values[:, whole * BLOCK :].mul_(factors[:, whole:])
        return values

    def _unpack_e4m3(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """e4m3 times 2 ** -8. Shifted, its bits are those of a half: 14 times as fast as torch's own conversion."""
        bits = self._bits.view(torch.int16)[: codes.numel()].view(codes.shape)
        bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(_E4M3_AS_HALF)
        values.copy_(bits.view(torch.float16))

    def _unpack_e2m1(self, codes: torch.Tensor, values: torch.Tensor) -> None:
        """e2m1 times 2 ** -8, a pair of values looked up by each byte."""
        index = self._bits[: codes.numel()]
        index.view(codes.shape).copy_(codes)
        torch.index_select(_pairs(codes.device), 0, index, out=values.view(-1).view(torch.int64))

    def _make_room(self, count: int, device: torch.device) -> None:
        if self._values.numel() < count or self._values.device != device:
            with torch.inference_mode(False):  # else what inference made could not be used outside it
                size = max(count, self._size)
                self._values = torch.empty(size, dtype=torch.float32, device=device)
                self._bits = torch.empty(-(-size // 2), dtype=torch.int32, device=device)


_PAIRS: dict[torch.device, torch.Tensor] = {}


def _pairs(device: torch.device) -> torch.Tensor:
    """[256] int64: for each byte the float32 bits of its two e2m1 values times 2 ** -8."""
    if device not in _PAIRS:
        with torch.inference_mode(False):
            values = torch.tensor(_E2M1, dtype=torch.float32, device=device) * 2.0**-_HALF_TO_E4M3_EXPONENT
            byte = torch.arange(256, device=device)
            _PAIRS[device] = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int64).flatten()
    return _PAIRS[device]


def _power_of_two(scale: torch.Tensor, exponent: int) -> torch.Tensor:
    """ue8m0 bytes to float32: 2 ** (byte - 127 + exponent), exponent above 0: a float32's exponent field."""
    return scale.to(torch.int32).add_(exponent).bitwise_left_shift_(23).view(torch.float32)
