"""``run_job``: read, dispatch, collect, commit.

``setup`` opens everything a job needs and makes the workers' settings; ``feeder`` reads rows into the window;
``collector`` journals results and writes parts; ``runner`` is the loop that joins them;
``retry`` runs error rows again.
"""
