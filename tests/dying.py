"""Optimizers whose step ends the process, or fails, as a kernel may: a child process imports them."""

import os
import signal

from ms_optim import AdamW


class Dies(AdamW):
    trials = ({},)

    def __init__(self, *arguments, backend, **options):
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGILL)


class Segfaults(AdamW):
    trials = ({},)

    def __init__(self, *arguments, backend, **options):
        os.kill(os.getpid(), signal.SIGSEGV)


class Fails(AdamW):
    trials = ({},)

    def __init__(self, *arguments, backend, **options):
        raise TypeError("of the optimizer's own")


class Wrong(AdamW):
    trials = ({},)

    def adam_direction(self, scalars, m, v):
        return m / scalars[0] * 1.001
