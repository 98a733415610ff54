"""The text worker: ``python -m punica_batch.workers.text_worker FD``. Renders and tokenizes rows; no torch.

A process of its own, so that the parent stays free and a template that never ends can be killed.
"""

from __future__ import annotations

import pyarrow as pa

from punica_batch.errors import PunicaError
from punica_batch.text.prepare import Preparer
from punica_batch.workers.child import Inbox, open_channel
from punica_batch.workers.messages import Chunk, Fatal, PreparedChunk, Ready, StartText


def main() -> None:
    channel = open_channel()
    start = channel.receive()
    assert isinstance(start, StartText)
    try:
        preparer = Preparer(start.settings)
    except PunicaError as error:
        channel.send(Fatal(start.epoch, error))
        return
    channel.send(Ready(start.epoch))
    inbox = Inbox(channel)
    while True:
        chunk = inbox.wait()
        assert isinstance(chunk, Chunk)
        with pa.ipc.open_stream(chunk.ipc) as stream:
            batches = list(stream)
        requests, errors, first_row = [], [], chunk.first_row
        for batch in batches:
            prepared = preparer.prepare(batch, first_row)
            requests += prepared.requests
            errors += prepared.errors
            first_row += batch.num_rows
        channel.send(PreparedChunk(start.epoch, chunk.chunk, tuple(requests), tuple(errors)))


if __name__ == "__main__":
    main()
