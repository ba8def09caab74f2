"""What holds of an op, or of a model on all its paths:

    python -m rlk.verify rms_norm         # as rlk-dispatch --verify, whose options it takes
    python -m rlk.verify tiny-qwen3       # as python -m rlk.verify_model
"""

import os
import sys

import rlk
from rlk import _tools


def main(arguments):
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    if arguments[0] in rlk.ops:
        program = _tools.dispatch_program()
        os.execv(program, [program, "--verify", *arguments])
    from rlk import verify_model
    return verify_model.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

sys.modules[__name__] = _tools.verify  # `import rlk.verify` leaves what has that name in rlk
