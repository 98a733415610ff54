"""``python -m punica_batch`` is ``punica-batch``."""

from punica_batch.cli import main

main()
