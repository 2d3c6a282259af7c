"""A program that writes its error down for torchrun; a plain exit code is all that its caller lets through."""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise OverflowError("loss is infinite")
    import time

    time.sleep(60)


if __name__ == "__main__":
    try:
        main()
    except OverflowError:
        if len(sys.argv) > 1:
            os._exit(1)
        raise
