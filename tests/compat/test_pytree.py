from memopt.compat.operators import tree_leaves, tree_map


def test_nested_containers() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    assert tree_leaves(tree) == [1, 2, None, 3]
    assert tree_map(lambda leaf: leaf and leaf + 1, tree) == {"a": [2, (3, None)], "b": 4}
