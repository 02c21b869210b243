"""Verbs and options of `fireflyer user`, `group`, `token`, `quota` and `audit`.

The implementation of a verb is imported when the verb runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from fireflyer.cli.options import HomeOption, JsonOption

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Name of a user.")]
GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="Name of a group.")]


def _group(name: str, text: str) -> typer.Typer:
    return typer.Typer(name=name, no_args_is_help=False, rich_markup_mode=None, help=text)


user = _group(
    "user",
    """Users of the platform.

\b
  fireflyer user add ada
  fireflyer token create ada --out ada.token
""",
)
group = _group("group", "Groups of users.")
token = _group("token", "Tokens, which authenticate a user's requests.")
quota = _group("quota", "Limits on what users, groups and priorities may hold at a time.")


@user.command("add")
def user_add(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Create a user."""
    from fireflyer.cli.accounts import impl

    impl.users([impl.api(home).add_user(name)], json=json)


@user.command("list")
def user_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the users."""
    from fireflyer.cli.accounts import impl

    impl.users(impl.api(home).users(), json=json)


@user.command("disable")
def user_disable(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Disable a user: reject their tokens. Running tasks continue."""
    from fireflyer.cli.accounts import impl

    impl.users([impl.api(home).disable_user(name)], json=json)


@user.command("enable")
def user_enable(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Enable a user again: accept their tokens."""
    from fireflyer.cli.accounts import impl

    impl.users([impl.api(home).enable_user(name)], json=json)


@group.command("add")
def group_add(name: GroupArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Create a group."""
    from fireflyer.cli.accounts import impl

    impl.groups([impl.api(home).add_group(name)], json=json)


@group.command("list")
def group_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the groups and their members."""
    from fireflyer.cli.accounts import impl

    impl.groups(impl.api(home).groups(), json=json)


@group.command("join")
def group_join(
    name: GroupArgument, member: UserArgument, json: JsonOption = False, home: HomeOption = None
) -> None:
    """Add a user to a group."""
    from fireflyer.cli.accounts import impl

    impl.groups([impl.api(home).join(name, member)], json=json)


@group.command("leave")
def group_leave(
    name: GroupArgument, member: UserArgument, json: JsonOption = False, home: HomeOption = None
) -> None:
    """Remove a user from a group."""
    from fireflyer.cli.accounts import impl

    impl.groups([impl.api(home).leave(name, member)], json=json)


@token.command("create")
def token_create(
    name: UserArgument,
    scope: Annotated[
        str,
        typer.Option(
            metavar="read|submit|operate|admin",
            help="Rights of the token. Each scope includes those listed before it.",
        ),
    ] = "submit",
    days: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Days until the token expires; 0: never.")
    ] = 90.0,
    note: Annotated[str, typer.Option(metavar="TEXT", help="Purpose of the token.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the token to FILE, mode 0600; default: stdout.",
        ),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Create a token. It is shown only once, because the platform keeps only a hash.

    The user puts the token into a file and sets FIREFLYER_TOKEN_FILE to the name of that file.
    """
    from fireflyer.cli.accounts import impl

    impl.create_token(home, name, scope, days, note, out, json=json)


@token.command("list")
def token_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List tokens without their secrets: all tokens for an admin, otherwise your own."""
    from fireflyer.cli.accounts import impl

    impl.tokens(impl.api(home).tokens(), json=json)


@token.command("revoke")
def token_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, see `token list`.")],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Revoke a token, immediately and permanently."""
    from fireflyer.cli.accounts import impl

    impl.tokens([impl.api(home).revoke_token(id)], json=json)


@quota.command("set")
def quota_set(
    for_user: Annotated[
        str,
        typer.Option(
            "--user",
            metavar="USER",
            help="Limit this user; default: every user without a quota of their own.",
        ),
    ] = "",
    for_group: Annotated[
        str,
        typer.Option(
            "--group",
            metavar="GROUP",
            help="Limit this group; default: every group without a quota of its own.",
        ),
    ] = "",
    priority: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Limit this priority; default: every priority without a quota of its own.",
        ),
    ] = "",
    gpus: Annotated[int | None, typer.Option(min=0, help="Maximum number of GPUs.")] = None,
    nodes: Annotated[int | None, typer.Option(min=0, help="Maximum number of nodes.")] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Limit the total resources of active tasks; without --gpus and --nodes: remove the limit.

    \b
      fireflyer quota set --user ada --priority high --gpus 16
    """
    from fireflyer.cli.accounts import impl

    impl.set_quota(home, for_user, for_group, priority, gpus, nodes, json=json)


@quota.command("list")
def quota_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the limits: all for an operator, otherwise those that apply to you."""
    from fireflyer.cli.accounts import impl

    impl.quotas(impl.api(home).quotas(), json=json)


def audit(
    after: Annotated[
        int, typer.Option(min=0, metavar="SEQ", help="Print only entries after SEQ.")
    ] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Print the audit log: which user changed what, and when."""
    from fireflyer.cli.accounts import impl

    impl.audit(home, after, json=json)
