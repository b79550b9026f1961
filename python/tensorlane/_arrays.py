# SPDX-License-Identifier: Apache-2.0
"""Arrays whose dtype NumPy has from another package (ml_dtypes): their elements go as bytes, with the dtype's name.

Nothing here is imported before such an array or tensor appears.
"""

from .errors import InvalidArgument

# The dtypes of ml_dtypes that have a whole number of bytes, and what tensorlane calls them.
_NAMES = {
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}
_BY_DTYPE = {dtype: name for name, dtype in _NAMES.items()}


def describe(array):
    """Returns (an array of unsigned integers in the same memory, name of the dtype), or None for any other array."""
    name = _NAMES.get(getattr(array.dtype, "name", None))
    if name and not array.dtype.isnative:
        raise InvalidArgument(f"the elements of {array.dtype.name} are in the other byte order; use "
                              "array.astype(array.dtype.newbyteorder(\"=\"))")
    return name and (array.view(f"u{array.dtype.itemsize}"), name)


def of_tensor(tensor, dtype, copy):
    """Returns an array, as Tensor.__array__ does; NumPy asks for it where a tensor has no buffer."""
    import numpy

    name = _BY_DTYPE.get(tensor.dtype)
    if tensor.dtype == "STRING":
        array = numpy.array(tensor.strings(), dtype=object).reshape(tensor.shape)
    elif name is None or tensor.is_dead or tensor.device != "cpu":
        try:
            array = numpy.asarray(memoryview(tensor))
        except BufferError:
            raise TypeError(f"NumPy has no array like {tensor!r}") from None
    else:
        try:
            import ml_dtypes
            found = getattr(ml_dtypes, name)  # Older versions lack some.
        except (ImportError, AttributeError):
            raise TypeError(f"NumPy has no dtype for {tensor.dtype}; install a current ml_dtypes, or use "
                            "torch.from_dlpack, or as_bytes") from None
        array = numpy.asarray(tensor.as_bytes()).view(found).reshape(tensor.shape)
    is_other = dtype is not None and array.dtype != dtype
    if copy is False and (is_other or tensor.dtype == "STRING"):
        raise ValueError(f"an array like {tensor!r} with the dtype {dtype or array.dtype} has memory of its own")
    if is_other:
        return array.astype(dtype)
    return array.copy() if copy else array
