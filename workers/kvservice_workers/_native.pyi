def attend(*fields: object) -> None: ...
def instruction_sets() -> tuple[str, ...]: ...

class Step:
    def __new__(cls, **fields: object) -> Step: ...
    def attend(
        self,
        k_address: int,
        v_address: int,
        num_pages: int,
        q: bytes,
        k: bytes,
        v: bytes,
        scale: float,
        /,
    ) -> bytes: ...
