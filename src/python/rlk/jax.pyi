from rlk._ops import *
