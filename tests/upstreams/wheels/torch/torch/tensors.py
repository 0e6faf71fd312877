"""Tensors as far as a smoke test of DeepEP needs them: a numpy array and a name for its type. There is no device but the CPU."""

import builtins

import numpy as np


class Dtype:
    """A type of numbers; `numpy` is what holds them. BF16 is held as float32 that has been rounded to it."""

    def __init__(self, name: str, held: type) -> None:
        self.name, self.numpy = name, np.dtype(held)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


bfloat16 = Dtype("bfloat16", np.float32)
float32 = Dtype("float32", np.float32)
int64 = Dtype("int64", np.int64)
int32 = Dtype("int32", np.int32)
bool = Dtype("bool", np.bool_)  # noqa: A001 - torch calls it so


class Tensor:
    """An array of numbers."""

    def __init__(self, array: np.ndarray, dtype: Dtype) -> None:
        self.array, self.dtype = np.ascontiguousarray(array, dtype=dtype.numpy), dtype

    @property
    def shape(self) -> tuple:
        """Its lengths."""
        return self.array.shape

    def to(self, device=None, dtype=None) -> "Tensor":
        """The same numbers as another type; the device is the CPU, whatever its name."""
        if isinstance(device, Dtype):
            device, dtype = None, device
        if dtype is None or dtype is self.dtype:
            return self
        array = self.array.astype(dtype.numpy)
        return Tensor(round_to_bfloat16(array) if dtype is bfloat16 else array, dtype)

    def float(self) -> "Tensor":
        """As 32-bit numbers."""
        return self.to(dtype=float32)

    def cpu(self) -> "Tensor":
        """Itself."""
        return self

    def numpy(self) -> np.ndarray:
        """The array."""
        if self.dtype is bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


def round_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The nearest numbers that 16 bits hold, even ones where two are equally near."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def from_numpy(array: np.ndarray) -> Tensor:
    """A tensor of the array's type."""
    kinds = {builtins.str(dtype.numpy): dtype for dtype in (float32, int64, int32, bool)}
    return Tensor(array, kinds[builtins.str(array.dtype)])
