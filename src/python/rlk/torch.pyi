from rlk._ops import *

from typing import Any

from rlk import parallel as parallel

def patch(model: Any) -> Any: ...
