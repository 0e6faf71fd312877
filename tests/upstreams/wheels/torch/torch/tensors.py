"""Tensors as far as our programs and the tests of DeepEP need them: a numpy array and a name for its type. There is no device but the CPU."""

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
float64 = Dtype("float64", np.float64)
uint8 = Dtype("uint8", np.uint8)
int64 = Dtype("int64", np.int64)
int32 = Dtype("int32", np.int32)
bool = Dtype("bool", np.bool_)  # noqa: A001 - torch calls it so


class Tensor:
    """An array of numbers."""

    def __init__(self, array: np.ndarray, dtype: Dtype) -> None:
        self.array, self.dtype, self.device = np.ascontiguousarray(array, dtype=dtype.numpy), dtype, "cpu"

    @property
    def shape(self) -> tuple:
        """Its lengths."""
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index) -> "Tensor":
        return Tensor(self.array[index], self.dtype)

    def __add__(self, other) -> "Tensor":
        return self._with(np.add, other)

    def __mul__(self, other) -> "Tensor":
        return self._with(np.multiply, other)

    def __ne__(self, other) -> "Tensor":  # type: ignore[override]
        return Tensor(self.array != _plain(other), bool)

    __hash__ = None

    def __float__(self) -> builtins.float:
        return builtins.float(self.array.item())

    def __int__(self) -> builtins.int:
        return builtins.int(self.array.item())

    def _with(self, operation, other) -> "Tensor":
        return Tensor(operation(self.array, _plain(other)), self.dtype)

    def remainder_(self, divisor) -> "Tensor":
        """Itself, each number replaced by what a division leaves."""
        np.remainder(self.array, divisor, out=self.array)
        return self

    def repeat(self, times: builtins.int) -> "Tensor":
        """So many copies, one behind the other."""
        return Tensor(np.tile(self.array, times), self.dtype)

    def nonzero(self) -> "Tensor":
        """The places of all that is not zero, one a row."""
        return Tensor(np.argwhere(self.array), int64)

    def flatten(self) -> "Tensor":
        """In one row."""
        return Tensor(self.array.reshape(-1), self.dtype)

    def sum(self) -> "Tensor":
        """The sum of all."""
        return Tensor(self.array.sum(), int64 if self.dtype is bool else self.dtype)

    def numel(self) -> builtins.int:
        """How many numbers there are."""
        return self.array.size

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
    kinds = {builtins.str(dtype.numpy): dtype for dtype in (float32, float64, int64, int32, uint8, bool)}
    return Tensor(array, kinds[builtins.str(array.dtype)])


def _plain(value):
    return value.array if isinstance(value, Tensor) else value


def arange(end, dtype=int64, device=None) -> Tensor:
    """The whole numbers below `end`."""
    return Tensor(np.arange(end, dtype=dtype.numpy), dtype)


def tensor(values, dtype=float32, device=None) -> Tensor:
    """A tensor of these numbers."""
    return Tensor(np.array(values), dtype)


def full_like(like: Tensor, value) -> Tensor:
    """As large as another one, all numbers the same."""
    return Tensor(np.full_like(like.array, value), like.dtype)


def zeros_like(like: Tensor) -> Tensor:
    """As large as another one, all zero."""
    return full_like(like, 0)


def cat(tensors) -> Tensor:
    """One behind the other."""
    return Tensor(np.concatenate([each.array for each in tensors]), tensors[0].dtype)
