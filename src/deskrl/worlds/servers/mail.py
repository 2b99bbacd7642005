"""The `mail` server: one mailbox as mbox files under `/.apps_data/mail/`.

Model: `inbox.mbox` holds what the user received, `sent.mbox` what was sent during the run. A mail's id
is its Message-ID without angle brackets.

Invariants: received mail is never changed; a sent mail is one append to `sent.mbox`; nothing leaves the
machine.
"""

from __future__ import annotations

import json
import mailbox
import uuid
from email.header import decode_header, make_header
from email.message import EmailMessage, Message
from email.utils import format_datetime, formataddr, getaddresses, parseaddr
from typing import Annotated

from deskrl.worlds.roots import WorldRoots, share
from deskrl.worlds.toolkit import ToolError

_FOLDERS = ("inbox", "sent")
_DEFAULT_USER = ("Me", "me@localhost.example")


class MailServer:
    """Tools over the user's mailbox."""

    TOOLS = ("list_mails", "read_mail", "search_mail", "send_mail", "reply_mail")

    def __init__(self, roots: WorldRoots) -> None:
        self._root = roots.apps_data

    def list_mails(
        self,
        limit: Annotated[int, "Most mails to return"] = 20,
        offset: Annotated[int, "Mails to skip"] = 0,
    ) -> str:
        """List mails, oldest first: id, folder, date, sender and subject."""
        if limit < 1 or offset < 0:
            raise ToolError("limit must be at least 1 and offset at least 0")
        mails = self._mails()
        page = [_summary(folder, message) for folder, message in mails[offset : offset + limit]]
        return json.dumps({"total": len(mails), "mails": page}, ensure_ascii=False)

    def read_mail(self, mail_id: Annotated[str, "Id as list_mails gives it"]) -> str:
        """Read one mail in full."""
        folder, message = self._find(mail_id)
        details = _summary(folder, message) | {"to": _header(message, "To"), "body": _body(message)}
        if message["Cc"]:
            details["cc"] = _header(message, "Cc")
        return json.dumps(details, ensure_ascii=False)

    def search_mail(
        self,
        query: Annotated[str, "Words that must all appear in sender, recipients, subject or body"],
        limit: Annotated[int, "Most mails to return"] = 20,
    ) -> str:
        """Search mails by words (case-insensitive)."""
        words = query.lower().split()
        if not words:
            raise ToolError("query must contain at least one word")
        found = []
        for folder, message in self._mails():
            fields = [_header(message, name) for name in ("From", "To", "Cc", "Subject")]
            text = "\n".join([*fields, _body(message)]).lower()
            if all(word in text for word in words):
                found.append(_summary(folder, message))
        return json.dumps({"total": len(found), "mails": found[: max(1, limit)]}, ensure_ascii=False)

    def send_mail(
        self,
        to: Annotated[str, "Recipient addresses, separated by commas"],
        subject: Annotated[str, "Subject line"],
        body: Annotated[str, "Plain-text body"],
        cc: Annotated[str | None, "Copy addresses, separated by commas"] = None,
    ) -> str:
        """Send a mail."""
        return self._send(to, subject, body, cc, None)

    def reply_mail(
        self,
        mail_id: Annotated[str, "Id of the mail to answer"],
        body: Annotated[str, "Plain-text body"],
    ) -> str:
        """Reply to the sender of a mail."""
        _, message = self._find(mail_id)
        subject = _header(message, "Subject")
        subject = subject if subject.lower().startswith("re:") else f"Re: {subject}"
        return self._send(_header(message, "Reply-To") or _header(message, "From"), subject, body, None, message)

    def _send(self, to: str, subject: str, body: str, cc: str | None, parent: Message | None) -> str:
        # getaddresses accepts anything; an address the model invented ("finance team") must fail.
        for field, value in (("to", to), ("cc", cc)):
            if value is None:
                continue
            addresses = [address for _, address in getaddresses([value])]
            if not addresses or any(not _is_address(address) for address in addresses):
                raise ToolError(f"{field} must be mail addresses separated by commas, got {value!r}")
        if any(c in subject for c in "\r\n"):
            raise ToolError("subject must be one line")
        from datetime import UTC, datetime

        message = EmailMessage()
        message["From"] = formataddr(self._user())
        message["To"] = " ".join(to.split())
        if cc:
            message["Cc"] = " ".join(cc.split())
        message["Subject"] = subject
        message["Date"] = format_datetime(datetime.now(UTC).replace(microsecond=0))
        message["Message-ID"] = f"<sent-{uuid.uuid4().hex[:12]}@{self._user()[1].split('@')[1]}>"
        if parent is not None:
            message["In-Reply-To"] = str(parent["Message-ID"])
        message.set_content(body)
        path = self._root.locate("mail/sent.mbox")
        path.parent.mkdir(parents=True, exist_ok=True)
        box = mailbox.mbox(path)
        try:
            box.add(message)
            box.flush()
        finally:
            box.close()
        share(path)
        return json.dumps({"sent": True, "id": _mail_id(message), "to": message["To"], "subject": subject})

    def _user(self) -> tuple[str, str]:
        """Return name and address of the mailbox's owner: whom the first received mail is to."""
        for folder, message in self._mails():
            if folder == "inbox":
                name, address = parseaddr(_header(message, "To"))
                if _is_address(address):
                    return name, address
        return _DEFAULT_USER

    def _mails(self) -> list[tuple[str, Message]]:
        mails: list[tuple[str, Message]] = []
        for folder in _FOLDERS:
            path = self._root.locate(f"mail/{folder}.mbox")
            if not path.is_file():
                continue
            box = mailbox.mbox(path, create=False)
            try:
                mails.extend((folder, message) for message in box)
            finally:
                box.close()
        return mails

    def _find(self, mail_id: str) -> tuple[str, Message]:
        wanted = mail_id.strip().strip("<>")
        for folder, message in self._mails():
            if _mail_id(message) == wanted:
                return folder, message
        raise ToolError(f"no mail with id {mail_id!r}; mail_list_mails shows the ids")


def _is_address(address: str) -> bool:
    local, at, domain = address.partition("@")
    return bool(local and at and "." in domain and " " not in address)


def _mail_id(message: Message) -> str:
    return str(message["Message-ID"] or "").strip().strip("<>")


def _header(message: Message, name: str) -> str:
    value = message[name]
    return "" if value is None else str(make_header(decode_header(str(value))))


def _summary(folder: str, message: Message) -> dict[str, str]:
    return {
        "id": _mail_id(message),
        "folder": folder,
        "date": _header(message, "Date"),
        "from": _header(message, "From"),
        "subject": _header(message, "Subject"),
    }


def _body(message: Message) -> str:
    for part in message.walk():
        if part.get_content_type() == "text/plain":
            payload = part.get_payload(decode=True)
            if isinstance(payload, bytes):
                return payload.decode(part.get_content_charset() or "utf-8", "replace").strip()
    return ""
