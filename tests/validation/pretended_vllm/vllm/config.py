"""What a KV cache is sent by."""


class KVTransferConfig:
    def __init__(self, **given):
        self.given = given
