"""One of the processes that tests start together: it runs programs one after the other, each in a folder of its own.

msrun --worker_num=2 worker_process.py FOLDER sharding shares
"""

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mindspore as ms
from runtime import SYNCHRONOUS, join, wait


def main(folder, *programs):
    rank, count = join()
    for program in programs:
        own = pathlib.Path(folder) / program
        own.mkdir(exist_ok=True)
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=SYNCHRONOUS)
        ms.reset_auto_parallel_context()
        importlib.import_module(f"{program}_worker").main(own, rank, count)
        wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
