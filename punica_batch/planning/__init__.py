"""What a job would do and what would fail, found before any work: the glue of ``plan``, ``validate`` and ``run``."""
