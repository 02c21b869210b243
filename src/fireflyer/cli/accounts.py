"""`fireflyer user`, `group`, `token`, `quota` and `audit`: their verbs and options. What a verb does is
imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="The platform's folder; else $FIREFLYER_SERVER, $FIREFLYER_HOME, or the default.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
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
token = _group("token", "Tokens: what a user's requests carry.")
quota = _group("quota", "How much users, groups and priorities may hold at a time.")


@user.command("add")
def user_add(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Make a user."""
    from fireflyer.cli import accounting

    accounting.users([accounting.api(home).add_user(name)], json=json)


@user.command("list")
def user_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the users."""
    from fireflyer.cli import accounting

    accounting.users(accounting.api(home).users(), json=json)


@user.command("disable")
def user_disable(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Take none of a user's tokens any more; tasks run on."""
    from fireflyer.cli import accounting

    accounting.users([accounting.api(home).disable_user(name)], json=json)


@user.command("enable")
def user_enable(name: UserArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Take a user's tokens again."""
    from fireflyer.cli import accounting

    accounting.users([accounting.api(home).enable_user(name)], json=json)


@group.command("add")
def group_add(name: GroupArgument, json: JsonOption = False, home: HomeOption = None) -> None:
    """Make a group."""
    from fireflyer.cli import accounting

    accounting.groups([accounting.api(home).add_group(name)], json=json)


@group.command("list")
def group_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the groups and their members."""
    from fireflyer.cli import accounting

    accounting.groups(accounting.api(home).groups(), json=json)


@group.command("join")
def group_join(
    name: GroupArgument, member: UserArgument, json: JsonOption = False, home: HomeOption = None
) -> None:
    """Make a user a member."""
    from fireflyer.cli import accounting

    accounting.groups([accounting.api(home).join(name, member)], json=json)


@group.command("leave")
def group_leave(
    name: GroupArgument, member: UserArgument, json: JsonOption = False, home: HomeOption = None
) -> None:
    """End a membership."""
    from fireflyer.cli import accounting

    accounting.groups([accounting.api(home).leave(name, member)], json=json)


@token.command("create")
def token_create(
    name: UserArgument,
    scope: Annotated[
        str,
        typer.Option(
            metavar="read|submit|operate|admin", help="What it allows; includes those before it."
        ),
    ] = "submit",
    days: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Until it expires; 0: never.")
    ] = 90.0,
    note: Annotated[str, typer.Option(metavar="TEXT", help="What it is for.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where it goes, mode 0600; else stdout."),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Make a token. It is shown this once: the platform keeps only a hash.

    Its user puts it into a file and names that in FIREFLYER_TOKEN_FILE.
    """
    from fireflyer.cli import accounting

    accounting.create_token(home, name, scope, days, note, out, json=json)


@token.command("list")
def token_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List tokens, without their secrets: all for an admin, else your own."""
    from fireflyer.cli import accounting

    accounting.tokens(accounting.api(home).tokens(), json=json)


@token.command("revoke")
def token_revoke(
    id: Annotated[str, typer.Argument(metavar="ID", help="The token's id, see `token list`.")],
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Take a token out of use, at once and for ever."""
    from fireflyer.cli import accounting

    accounting.tokens([accounting.api(home).revoke_token(id)], json=json)


@quota.command("set")
def quota_set(
    for_user: Annotated[
        str, typer.Option("--user", metavar="USER", help="Else each without one of his own.")
    ] = "",
    for_group: Annotated[
        str, typer.Option("--group", metavar="GROUP", help="Else each, likewise.")
    ] = "",
    priority: Annotated[str, typer.Option(metavar="NAME", help="Else each, likewise.")] = "",
    gpus: Annotated[int | None, typer.Option(min=0, help="At most so many GPUs.")] = None,
    nodes: Annotated[int | None, typer.Option(min=0, help="At most so many nodes.")] = None,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Limit what active tasks hold together; without --gpus and --nodes: remove the limit.

    \b
      fireflyer quota set --user ada --priority high --gpus 16
    """
    from fireflyer.cli import accounting

    accounting.set_quota(home, for_user, for_group, priority, gpus, nodes, json=json)


@quota.command("list")
def quota_list(json: JsonOption = False, home: HomeOption = None) -> None:
    """List the limits: all for an operator, else those that concern you."""
    from fireflyer.cli import accounting

    accounting.quotas(accounting.api(home).quotas(), json=json)


def audit(
    after: Annotated[int, typer.Option(min=0, metavar="SEQ", help="Only newer ones.")] = 0,
    json: JsonOption = False,
    home: HomeOption = None,
) -> None:
    """Print who changed what, and when."""
    from fireflyer.cli import accounting

    accounting.audit(home, after, json=json)
