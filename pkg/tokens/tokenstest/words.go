// SPDX-License-Identifier: Apache-2.0

package tokenstest

import "strings"

// Common words, the most common first.
var (
	englishWords = strings.Fields(`the of and to a in is that for it as was with be by on not he his but at are this have from or
		had an they which one you were all her she there would their we him been has when who will no more if out so up said what
		its about than into them can only other time new some could these two may first then do any like my now over such our man me
		even most made after also did many off before must well back through years much where your way down should because long each
		just state those people too mr how little good world make very year still see own work men day get here old life both between
		being under three never know same last another while us might great go come since against right came take used himself few
		house use place during high without again home around small however found part school once general upon every does got number
		system token request server model answer prompt memory cache network balance engine weight session context message function
		parameter result value error process thread kernel packet address connection language structure different important possible
		experience understanding performance information development government international environment organization available
		particular considered necessary significant responsibility characteristics approximately nevertheless simultaneously`)

	codeWords = strings.Fields(`get set is on new id name value key data list item node error err ctx index count size len buf
		user request response handler config options client server parse read write open close init update delete create find
		filter map reduce string bytes number result state event type path file url http json token cache queue lock worker
		thread manager factory builder service provider context module component render props async await callback`)

	onsets = strings.Fields(`b br c ch cl d dr f fl g gr h j k kl l m n p pl pr qu r s sh sk sl st str t th tr v w y z x`)
	vowels = strings.Fields(`a e i o u ai ea ee ie oa oo ou y`)
	codas  = strings.Fields(`n r s t l m d ck ng nt rd st x th sh ph er on ing`)

	chineseWords = strings.Fields(`的 是 我们 在 了 不 和 有 这 他们 中国 一个 人 就 可以 上 来 说 到 时候 大 为 子 你 生活 自己 出 会 也 年 得
		那 要 下 以 后 过 多 没有 去 能 对 小 都 然 于 心 学 么 之 发 工作 天 如 现在 问题 系统 使用 服务器 模型 请求 数据 用户 网络 软件 安装
		文件 命令 配置 程序 信息 管理 计算机 技术 开发 环境 内存 处理 支持 功能 需要 进行 通过 如果 但是 因为 所以 以及 其他 不同 重要 提供 选择
		语言 世界 国家 社会 经济 发展 历史 文化 教育 研究 科学 时间 地方 方法 结果 情况 关系 政府 公司 市场 东西 朋友 孩子 老师 学生 先生 非常
		已经 可能 应该 虽然 或者 这些 那些 什么 怎么 为什么 负载均衡 人工智能 上下文 分布式 操作系统 数据库 虚拟机 中华人民共和国`)
	hanChars = []rune("的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生自会那后能对着事其里所去行过家十用发天如然作方成者多日都三小军二无同么经法当起与好看学进种将还分此心前面又定见只主没公从知使实现理高长正外老机力等情重水全文新部车名书口气物电路先报题风海量马区花石处")

	japaneseWords = strings.Fields(`の は に を が と で し て い た こと する です ます ある いる れる この その という ため もの これ それ から まで
		よう なる できる 場合 使用 設定 ファイル システム サーバー データ モデル リクエスト ユーザー ネットワーク ソフトウェア インストール コマンド
		パッケージ 情報 管理 環境 日本 東京 時間 問題 方法 必要 可能 以下 自分 今日 仕事 世界 社会 学校 会社 電話 お誕生日 おめでとう ございます
		ください について において として により 言語 処理 実行 確認 変更 追加 削除 表示 開発 提供`)
	kanaChars = []rune("のいにはをとるがしでてたなかれもらりこうすまよさきくだつけそえどみせめちわあんアイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホマミムメモヤユヨラリルレロワンーガギグゲゴザジズゼゾダヂヅデドバビブベボパピプペポァィゥェォャュョッ日本語文字化")

	koreanWords = strings.Fields(`이 그 저 것 수 등 및 는 은 를 을 에서 으로 하는 있는 있다 한다 합니다 입니다 위해 대한 때문에 사용 시스템 서버 데이터 모델
		요청 사용자 네트워크 소프트웨어 설치 파일 명령 설정 프로그램 정보 관리 컴퓨터 기술 개발 환경 메모리 처리 지원 기능 필요 경우 다른 중요한 한국 서울 시간
		문제 방법 결과 관계 회사 친구 학교 선생님 학생 매우 이미 가능 안녕하세요 세계 감사합니다 그리고 하지만 그러나 따라서`)
	hangulChars = []rune("가나다라마바사아자차카타파하고노도로모보소오조초코토포호구누두루무부수우주추쿠투푸후기니디리미비시이지치키티피히는은를을의에서한국어글뷁쀍")

	arabicWords = strings.Fields(`في من على إلى أن هذا التي الذي ما لا كان هو هي مع عن كل بعد قبل بين حتى إذا لم قد يكون النظام الخادم البيانات
		النموذج الطلب المستخدم الشبكة البرنامج الملف الأمر الإعدادات المعلومات الإدارة الحاسوب التقنية التطوير البيئة الذاكرة اللغة العربية
		العالم الوقت المشكلة الطريقة النتيجة العلاقة الشركة المدرسة السلام عليكم شكرا مرحبا`)

	russianWords = strings.Fields(`и в не на я что он с как это по но они мы она так из у который то за свой весь год от для сказать один такой
		человек время система сервер данные модель запрос пользователь сеть программа файл команда настройка информация управление компьютер
		технология разработка окружение память обработка поддержка функция необходимо случай другой важный мир вопрос результат здравствуйте
		государственный достопримечательность`)

	germanWords = strings.Fields(`der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er hat dass
		sie nach wird bei einer um am sind noch wie einem über so zum haben nur oder aber vor zur bis mehr durch man Größe Übung
		System Server Daten Modell Anfrage Benutzer Netzwerk Lastverteilung Geschwindigkeitsbegrenzung Donaudampfschifffahrt schließlich`)

	thaiWords = strings.Fields(`ที่ และ ใน ของ เป็น การ มี ได้ จะ ไม่ ให้ ว่า กับ จาก นี้ โดย หรือ ความ คน ประเทศไทย ระบบ ข้อมูล ผู้ใช้ เครือข่าย โปรแกรม
		ไฟล์ คำสั่ง สวัสดีครับ ขอบคุณ ภาษา เวลา ปัญหา วิธี`)
)

// unicodeBlocks are ranges of code points from which random text is drawn.
var unicodeBlocks = [][2]rune{
	{0, 0x80}, {0x80, 0x250}, {0x250, 0x370}, {0x300, 0x370}, {0x370, 0x530}, {0x530, 0x700}, {0x700, 0xe00}, {0xe00, 0x1200},
	{0x1100, 0x2000}, {0x2000, 0x2070}, {0x2070, 0x2e00}, {0x2e80, 0x3100}, {0x3040, 0x3100}, {0x3400, 0x4e00}, {0x4e00, 0xa000},
	{0x4e00, 0x5200}, {0xa000, 0xac00}, {0xac00, 0xd7b0}, {0xe000, 0xf900}, {0xf900, 0x10000}, {0xfe00, 0xff00}, {0xff00, 0x10000},
	{0x10000, 0x11000}, {0x1d400, 0x1d800}, {0x1f000, 0x1fb00}, {0x20000, 0x2a6e0}, {0xe0000, 0xe01f0}, {0x100000, 0x110000},
}
