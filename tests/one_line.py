"""What a script says when it cannot do what it was asked for."""


def assert_one_clear_line(error: str, said: str) -> None:
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1
