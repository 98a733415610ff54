"""Worker processes: the parent's side (``pool``, ``text_pool``), the children's side, and the messages between them."""
