"""The dtypes of stored and cast weights."""

from typing import Any, Literal

import ml_dtypes
import numpy as np

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
