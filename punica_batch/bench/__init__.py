"""``punica-batch bench``: the Punica paper's measurements on this machine, and the ones that it left out.

A benchmark is a module with ``run(options)``, listed in ``registry.BENCHES``. It appends JSON lines through
``record.Recorder`` and draws its figure through ``figure``; what it compares with comes from ``device.ceilings``,
measured in the same run.
"""
