from rlk._ops import *

from typing import Any

def patch(model: Any) -> Any: ...
