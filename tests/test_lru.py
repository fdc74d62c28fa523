from memopt.lru import LruCache


def test_the_value_not_used_for_longest_goes_first() -> None:
    recent: LruCache[str, int] = LruCache(2)
    recent["a"], recent["b"] = 1, 2
    assert recent["a"] == 1
    recent["c"] = 3
    assert "b" not in recent
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)


def test_clear_leaves_nothing() -> None:
    recent: LruCache[str, int] = LruCache(2)
    recent["a"] = 1
    recent.clear()
    assert len(recent) == 0
    assert recent.get("a") is None
